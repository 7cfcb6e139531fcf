"""From step plans to results: device tables, pages, the model's forward pass and sampling."""
