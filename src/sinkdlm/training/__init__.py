"""Train models: one loop for pretraining, adaptation and SFT, which differ only in data, initial weights and hyper-parameters."""
