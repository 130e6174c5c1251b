"""`nn.Module`s and the table that builds them. No losses, loops or files."""
