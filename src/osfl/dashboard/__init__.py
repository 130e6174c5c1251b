"""The coordinator's web page for one round. It shows the folder's state and calls the coordinator's role."""
