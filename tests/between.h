/* Included before the helper: lets a test act between any two accesses to shared memory, as another worker would. */
static void (*between)(void);

__attribute__((visibility("default"))) void shmlimit_test_between(void (*act)(void)) { between = act; }

#define YIELD(word) (between ? between() : (void)(word))
