"""Files of rows of OneFlow and dynamicemb."""
