"""Bases that transformers' modelling code computes, with this engine's attention and linears."""
