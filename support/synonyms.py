"""What users of nanoGPT, build-nanogpt and llm.c type, and what it is called here."""

SYNONYMS = {
    "--batch-size": "--micro-batch-size, sequences per pass, or --batch-tokens, tokens per step",
    "--block-size": "--seq-len",
    "--dataset": "--data-dir, a folder of token shards",
    "--decay-lr": "--cosine or --no-cosine",
    "--dtype": "--bf16, --fp16, or --no-bf16 for float32",
    "--eval-interval": "--eval-every",
    "--eval-iters": "--eval-tokens",
    "--gradient-accumulation-steps": "--batch-tokens, tokens per step",
    "--log-interval": "--log-every",
    "--lr": "--learning-rate",
    "--max-iters": "--steps",
    "--max-new-tokens": "--sample-tokens",
    "--min-lr": "--decay-to, a share of the peak",
    "--num-iterations": "--steps",
    "--sequence-length": "--seq-len",
    "--start": "--prompt",
    "--total-batch-size": "--batch-tokens, tokens per step",
    "--val-loss-every": "--eval-every",
    "--wandb-log": "--wandb",
    "--warmup-iters": "--warmup-steps",
}
