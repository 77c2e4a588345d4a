"""What commands ask of a torchtitan job: doctor, compare, simulate, advise."""
