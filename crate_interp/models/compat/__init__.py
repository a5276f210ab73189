"""Makes models work as other libraries expect: TransformerLens, transformers and torch.compile."""
