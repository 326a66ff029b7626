"""Numerical building blocks shared by backbones, contexts and corrections."""
