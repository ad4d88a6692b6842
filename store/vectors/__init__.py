"""Vector indexes: FAISS files with their rows, built, chosen and searched."""
