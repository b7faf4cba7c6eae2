// Names that classic scripts meet outside a page. A script exports to Node by `Object.assign(module.exports, {…})`: with
// `module.exports = …` TypeScript would take it for a module and hide its names from the other scripts.
declare var module: { exports: object; require(path: string): any } | undefined;
declare function importScripts(...urls: string[]): void;
