"""The layers of a network: attention, sparse steps, blocks, norms, embeddings."""
