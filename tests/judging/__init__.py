"""Tests of osfl.judging."""
