"""Calls of other libraries in regions, each compared with float32."""
