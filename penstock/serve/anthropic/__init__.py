"""Anthropic's Messages API: what it asks, put as the chat that every API asks, and how it is
answered.
"""
