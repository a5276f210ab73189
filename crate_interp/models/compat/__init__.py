"""What other libraries expect of a model: TransformerLens, transformers and torch.compile."""
