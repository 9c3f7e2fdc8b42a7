"""Inference engines and the proxy that is the only door to them."""
