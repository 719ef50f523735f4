"""The README.md of a checkpoint, which Hugging Face calls a model card."""

from model import GPT
from support.pretrained import changes

CARD = "README.md"
TAGS = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
"""
LOAD = """```python
from transformers import pipeline

generate = pipeline("text-generation", "THIS FOLDER")
```

In the program that trained it, `python sample.py THIS FOLDER` samples from it, and
`python train_gpt2.py --init-from THIS FOLDER --data-dir DATA` trains it further, on data that
`python prepare_data.py --tokenizer THIS FOLDER --input TEXT --data-dir DATA` makes.
"""
LOAD_CHANGED = """The network is a changed GPT-2, with {}, so transformers refuses it. In the
program that trained it, `python sample.py THIS FOLDER` samples from it. If transformers' GPT-2 can
express the change, make it a field of GPTConfig, map that in hf_config in support/pretrained.py,
and add its name to MAPPED there.
"""


def model_card(model: GPT, state: dict) -> str:
    """Return what the network is, how it was trained, and how to load it."""
    shape, config, changed = model.config, state["config"], ", ".join(changes(model.config))
    size = model.num_elements(list(model.parameters()))
    steps = f"{state['step']:,} of {config['steps']:,} steps of {config['batch_tokens']:,} tokens"
    data = config["data_dir"] or "Python's standard library"
    newest = list(state["val_losses"].items())[-5:]
    losses = "\n".join(f"- After step {k:,}: {v:.4f}" for k, v in newest) or "- none yet"
    return f"""{"" if changed else TAGS}# A GPT-2

- Shape: {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} channels; {size:,} parameters
- Vocabulary: {shape.vocab_size:,} tokens ({state["tokenizer"]}), {shape.seq_len:,} positions
- Training: {steps}, on {data}

Validation losses, in nats per token:

{losses}

{LOAD_CHANGED.format(changed) if changed else LOAD}"""
