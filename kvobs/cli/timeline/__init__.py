"""Read the recordings of the flight recorder, and write them as one Chrome trace: `kvobs timeline`."""
