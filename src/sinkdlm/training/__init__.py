"""Training: one loop for pretraining, adaptation and SFT, which differ in data, initial weights and hyper-parameters alone."""
