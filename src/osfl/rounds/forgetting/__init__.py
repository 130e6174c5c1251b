"""Exact unlearning: a client's upload is deleted, and the server phase is repeated as if it had never been sent.

    request.py        what is to go, and every reason to refuse, before anything is touched
    execution.py      the steps; a kill anywhere costs nothing, the same command goes on
    proof.py          the certificate's claims, looked at again

docs/forgetting.md explains what is exact and what cannot be undone.
"""

from osfl.rounds.forgetting.execution import forget
from osfl.rounds.forgetting.proof import Finding, verify

__all__ = ["Finding", "forget", "verify"]
