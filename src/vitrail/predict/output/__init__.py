"""Files of results: predictions and features in every format, and the folder of an unfinished job."""
