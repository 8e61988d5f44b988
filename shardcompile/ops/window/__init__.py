"""Windows over images: convolution, pooling, interpolation."""
