"""`nn.Module`s and the table that builds them. No losses, loops or files.

Begin with architectures.py (their names) and build.py.
"""
