"""The naive truth that fast code is compared with, and small helpers that tests share."""
