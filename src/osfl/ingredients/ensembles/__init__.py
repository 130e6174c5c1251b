"""Outputs of several models as one."""
