"""The modules behind train_gpt2.py, evaluate.py, sample.py and prepare_data.py."""
