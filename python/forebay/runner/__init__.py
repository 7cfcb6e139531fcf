"""Turns step plans into results: device tables, pages, the model's forward pass and sampling."""
