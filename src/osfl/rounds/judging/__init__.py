"""Uploads judged by what they say about each other, before the server phase. No image of any site is needed.

Belongs here: rules that name a site whose upload contradicts the others. Does not belong: what one upload alone shows (the
gate in osfl.wire, and `Method.check_upload`), and decisions: the coordinator leaves a site out, or keeps it.
"""
