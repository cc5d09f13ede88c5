"""Stateless forwards that are bound onto the model's own modules."""
