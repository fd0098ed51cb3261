"""Stages computed by llama.cpp through the low-level C API of llama-cpp-python (ADR 0011)."""
