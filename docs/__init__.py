"""Documentation: one page a question, and the generator of the tables in it (``python -m docs``)."""
