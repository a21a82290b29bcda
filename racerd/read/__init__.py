"""Reads: plan the pages, join or lead a flight for each, walk the ladder, deliver.

Layer: read. The ladder is memory, disk, (peer,) origin.
"""
