"""Training logs and what is measured from them."""
