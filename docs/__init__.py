"""Documentation: one page a question, and what makes the tables in it (``docs/cog.txt``)."""
