"""Tests, in the same folders as what they test. A package, so that `tests.references` can be nobody else's."""
