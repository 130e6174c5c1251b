"""The coordinator's desk: a small web page for one round. It shows the folder's state and calls the coordinator."""
