"""Inductor."""
