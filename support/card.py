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
TEXT = """# A GPT-2

- Shape: {shape}; {params} parameters
- Vocabulary: {tokens}
- Training: {training}, on {data}

Validation losses, in nats per token:

{losses}

{load}"""
LOAD = """```python
from transformers import pipeline

generate = pipeline("text-generation", "THIS FOLDER")
```

The program that trained it samples it by `python sample.py THIS FOLDER`, and trains it further by
`python train_gpt2.py --init-from THIS FOLDER --data-dir DATA`.
"""
LOAD_CHANGED = """The network is a changed GPT-2, with {}, so transformers refuses it. The program
that trained it samples it by `python sample.py THIS FOLDER`. If transformers' GPT-2 can express the
change, map it in hf_config in support/pretrained.py.
"""


def model_card(model: GPT, state: dict) -> str:
    """Return what the network is, how it was trained, and how to load it."""
    shape, config, step = model.config, state["config"], state["step"]
    losses = [f"- After step {k:,}: {v:.4f}" for k, v in list(state["val_losses"].items())[-5:]]
    text = TEXT.format(
        shape=f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} channels",
        params=f"{model.num_elements(list(model.parameters())):,}",
        tokens=f"{shape.vocab_size:,} tokens ({state['tokenizer']}), {shape.seq_len:,} positions",
        training=f"{step:,} of {config['steps']:,} steps of {config['batch_tokens']:,} tokens",
        data=config["data_dir"] or "Python's standard library",
        losses="\n".join(losses) or "- none yet",
        load=LOAD_CHANGED.format(", ".join(changes(shape))) if changes(shape) else LOAD,
    )
    return text if changes(shape) else TAGS + text
