"""The Hugging Face Hub: access, revisions, publishing."""
