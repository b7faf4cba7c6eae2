"""C sources that several tests of the client launch."""

ADD = "void add(float *y, const float *x, float a, int n) { for (int i = 0; i < n; i++) y[i] += a * x[i]; }"
COUNT = "void count(int *n) { n[0]++; }"
SPIN = "void spin(long n) { for (volatile long i = 0; i < n; i++); }"
