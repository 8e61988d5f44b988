"""Ops of windows over images: convolution, pooling, interpolation, unfolding."""
