"""Scripted roles: fakes that validate what they get."""
