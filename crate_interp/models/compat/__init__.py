"""What other libraries expect of a model: TransformerLens, transformers, torch.compile."""
