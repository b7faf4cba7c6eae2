'use strict';
// A classic worker that loads scripts of browser/ and evaluates what it is sent, for the tests.

const names = location.hash.slice(1).split(',').filter(Boolean);
importScripts(...names.map((name) => (name.includes('/') ? name : `../../../browser/${name}.js`)));

onmessage = async ({ data: { call, expression } }) => {
  try {
    postMessage({ call, value: JSON.stringify(await (0, eval)(expression)) ?? 'null' });
  } catch (error) {
    postMessage({ call, error: `${error}\n${error?.stack}` });
  }
};
