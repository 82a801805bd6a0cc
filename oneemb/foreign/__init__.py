"""Readers and writers of the files in which OneFlow and dynamicemb keep rows."""
