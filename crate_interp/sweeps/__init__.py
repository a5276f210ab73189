"""Sweeps: probes measure a model on streamed data, and keep numbers but not activations."""
