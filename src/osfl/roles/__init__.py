"""What each party of a round does, whoever carries the bytes: site, coordinator, peer, and fusion of plain checkpoints."""
