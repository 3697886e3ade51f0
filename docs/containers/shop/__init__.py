"""A small shop: its web application enqueues an invoice with each order, and a worker writes it."""
