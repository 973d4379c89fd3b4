"""Kernels of one backend each, beside a `keras.ops` reference that tests them."""
