"""Profiles that are estimated: exact bytes and roofline times without memory."""
