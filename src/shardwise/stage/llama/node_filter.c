/* Answers llama.cpp's question "do you want this graph node?" without entering Python.

   llama.cpp asks the callback of `cb_eval` for each of the hundreds of nodes of a graph; only one or two of them are
   wanted. This filter compares names and passes on to `matched` (the Python callback of `tap.py`) only what matters.
   No header of Python or ggml is needed: the place of the name comes from `tap.py`. */

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

#define MAX_NAME 64
#define MAX_WANTED 2

typedef bool (*node_callback)(void *tensor, bool ask, void *user);

struct node_filter {
    size_t name_offset; /* bytes from the start of a ggml_tensor to its name */
    size_t num_wanted;
    size_t lengths[MAX_WANTED]; /* bytes to compare, the final 0 included */
    char names[MAX_WANTED][MAX_NAME];
    node_callback matched;
};

EXPORT bool shardwise_filter_node(void *tensor, bool ask, void *user) {
    const struct node_filter *filter = (const struct node_filter *)user;
    if (!ask) return filter->matched(tensor, ask, user);
    const char *name = (const char *)tensor + filter->name_offset;
    for (size_t i = 0; i < filter->num_wanted; i++)
        if (memcmp(name, filter->names[i], filter->lengths[i]) == 0) return true;
    return false;
}

/* setuptools builds this as an extension module, whose linker may ask for an entry point; it is opened with ctypes. */
EXPORT void *PyInit__node_filter(void) { return NULL; }
