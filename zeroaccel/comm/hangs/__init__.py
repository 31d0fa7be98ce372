"""Detecting that ranks no longer run the same program, and ending the job with one message."""
