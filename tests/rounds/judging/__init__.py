"""Tests of osfl.rounds.judging."""
