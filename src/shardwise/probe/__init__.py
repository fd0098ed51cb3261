"""Measures nodes through the real backend and links through the real transport; `doctor` looks for what would stop it."""
